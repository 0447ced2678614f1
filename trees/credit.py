"""How much of an episode's advantage its auxiliary branches take.

The papers train the main line alone. Whoever trains more says by which rule:

- ``none``: nothing but the main line is trained.
- ``outcome``: every trained token takes the advantage of the episode, whatever its kind.
- ``scaled``: the auxiliary branches share the advantage: each takes it divided by their number, so that an episode
  with many of them weighs no more than one with a few.
"""

from __future__ import annotations

from typing import Literal

from trees.tree import Tree

AuxCredit = Literal["none", "outcome", "scaled"]
MAIN = "main"


def credits_of(tree: Tree, rule: AuxCredit) -> dict[int, float]:
    """The share of the episode's advantage for every trained node, by its id.

    Raises ``ValueError`` where an auxiliary branch is to be trained under the rule ``none``.
    """
    trained = [node for node in tree.nodes if node.trained]
    others = [node for node in trained if node.kind != MAIN]
    if others and rule == "none":
        raise ValueError(
            f"got a trained branch of kind {others[0].kind!r} and aux_credit 'none', expected only 'main': filter the "
            "tree, or choose aux_credit outcome or scaled"
        )
    share = 1.0 if rule == "outcome" else 1.0 / max(1, branches(tree))
    return {node.id: 1.0 if node.kind == MAIN else share for node in trained}


def branches(tree: Tree) -> int:
    """How many auxiliary branches are trained: a call of another kind than the call that it extends begins one."""
    begun = 0
    for node in tree.nodes:
        if node.trained and node.kind != MAIN:
            above = tree.call_parents[node.id]
            begun += above < 0 or tree.nodes[above].kind != node.kind
    return begun
