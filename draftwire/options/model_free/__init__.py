"""Drafts that no model computes: they continue a text as an earlier place of it went on. No torch but in cascades."""
