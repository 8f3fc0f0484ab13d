"""What may be asked for, said once: parameters, forms, log-probabilities, rules by name."""
