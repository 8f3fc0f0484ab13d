"""Finds what llguidance adds to Lark in a grammar. Users write grammars, so each search is linear in the text."""

import re

_HIDDEN = re.compile(
    r"""
    (?: // | \# ) [^\n]*+                        # a comment
    | " (?: \\. | [^"\\\n] )*+ (?: "i? )?+       # a string
    | / (?: \\. | [^/\\] )++ (?: / [a-z]*+ )?+   # an expression, perhaps on several lines
    """,
    re.VERBOSE,
)
"""Parts that may hold anything. One that is not closed extends as far as it can, so that nothing is looked at twice."""

_EXTENSION = re.compile(
    r"""
    % (?! (?: ignore | import | declare | override ) \b ) \w*+   # %json, %regex, %lark, %if ...
    | < [^<>\n]*+ >?                                             # a special token
    | @ [\w{}-]*+                                                # another grammar
    | \[ [^\[\]]*+ \] \s*+ :                                     # attributes of a rule
    | \] \s*+ :
    | :: \w*+                                                    # parameters
    | & | ~ (?! [ \t]*+ [0-9] )                                  # intersection and complement
    """,
    re.VERBOSE,
)


def find_extension(grammar: str) -> str | None:
    """Returns the first extension of Lark in a grammar, as it is written there; None if there is none."""
    found = _EXTENSION.search(_HIDDEN.sub(_visible, grammar))
    return None if found is None else found.group().strip()


def _visible(hidden: re.Match[str]) -> str:
    """Returns what a literal leaves behind, so that its neighbours do not become one; a comment leaves nothing."""
    return "" if hidden.group().startswith(("#", "//")) else '""'
