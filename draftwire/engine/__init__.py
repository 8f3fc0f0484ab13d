"""Code that drafter and verifier share: sessions, admission, leases, prefill, the torch thread, ranks."""
