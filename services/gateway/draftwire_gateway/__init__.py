"""The process that users talk to: it joins a drafter and a verifier into a stream of text."""
