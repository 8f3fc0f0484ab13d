"""The name by which a verifier offers the drafts of its own language model. No torch here."""

DRAFT_MODEL = "model"
