"""Options of sessions: parts that the loop does not know, beside fixed chains of a drafter."""
