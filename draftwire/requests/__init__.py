"""Request types shared by all services: sampling parameters, structured output, log-probabilities, rule names."""
