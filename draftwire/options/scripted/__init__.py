"""A scripted drafter, for tests of loads and failures."""
