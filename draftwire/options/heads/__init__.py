"""Draft heads: small models that draft from the target's own hidden states. EAGLE-1, EAGLE-3, Medusa and Hydra."""
