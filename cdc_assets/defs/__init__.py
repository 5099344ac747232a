"""The sources: one folder with one ``defs.yaml`` each, and what is built on them.

The demo, a shop and its mart, is loaded while there is nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

DEMO = frozenset({"shop", "shop_mart"})


def loaded(names: Iterable[str], demo: str | None) -> set[str]:
    """Those of the folders that are loaded; ``demo``: CDC_ASSETS_DEMO.

    1 or 0 to say oneself whether the demo is; ``only``: nothing but the demo.
    """
    if demo == "only":
        return {*DEMO}
    own = {name for name in names if not name.startswith(("_", "."))} - DEMO
    return own | DEMO if demo == "1" or (demo != "0" and not own) else own
