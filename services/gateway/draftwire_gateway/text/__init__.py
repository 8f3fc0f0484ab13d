"""Text and tokens: conversations to ids, ids to text."""
