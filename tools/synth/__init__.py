"""Makes synthetic pairs of models of real size, with a chosen acceptance rate: docs/synthetic-pairs.md."""
