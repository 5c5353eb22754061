"""Arrays that a call takes over, checked before it does."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
from jax import stages

from aot_lora._jax_compat.layouts import layout_text
from aot_lora.errors import DonatedError, OutOfPlanError
from aot_lora.signature import Signature

NEEDED = jax.__version_info__ < (0, 12)
"""Whether this JAX needs the check; it costs a look at every argument."""


class CheckedCompiled(stages.Compiled):
    """A `jax.stages.Compiled` that refuses arrays which are given away or laid out otherwise.

    On one device XLA refuses them itself. Over several, the process ends on jax 0.10.2: one device
    refuses while another already runs.
    """

    def check(self, signature: Signature) -> CheckedCompiled:
        """Says what it takes over; returns itself."""
        self._taken = [(i, signature.inputs[i].name) for i in signature.donated]
        layouts = zip(signature.kept, signature.layouts, strict=True) if signature.layouts else ()
        self._laid_out = [(i, signature.inputs[i].name, text) for i, text in layouts if text]
        self._count = len(signature.inputs)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it.

        Raises:
          OutOfPlanError: an argument is in another layout than the recorded one.
          DonatedError: an argument that it takes over was taken over before, or comes twice.
        """
        leaves = jax.tree.leaves((args, kwargs))
        if len(leaves) == self._count:  # Else JAX has more to say about it.
            self._refuse(leaves)
            self._refuse_layouts(leaves)
        return super().__call__(*args, **kwargs)

    def _refuse_layouts(self, leaves: list[Any]) -> None:
        for position, name, expected in self._laid_out:
            layout = getattr(getattr(leaves[position], "format", None), "layout", None)
            found = "JAX's default" if layout is None else layout_text(layout)
            if found != expected:
                raise OutOfPlanError(
                    f"`{name}` lies in another layout than the executable was compiled for",
                    expected=expected,
                    found=found,
                    next_step="jax.device_put it with the format in `executable.input_formats`",
                )

    def _refuse(self, leaves: list[Any]) -> None:
        counts = Counter(map(id, leaves))
        for position, name in self._taken:
            given = leaves[position]
            if isinstance(given, jax.Array) and given.is_deleted():
                raise DonatedError(
                    f"`{name}` was given away or deleted",
                    expected="an array that is still there",
                    next_step="go on with the result of the call that took it over",
                )
            if counts[id(given)] > 1:
                raise DonatedError(
                    f"`{name}` is taken over, and comes twice in one call",
                    expected="an array that no other argument is",
                    next_step="give a copy of it to the other argument",
                )
