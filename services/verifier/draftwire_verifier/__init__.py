"""The verifier service: scores draft tokens with the target model and decides which are accepted."""
