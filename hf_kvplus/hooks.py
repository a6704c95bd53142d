"""Functions that take over methods of transformers' classes, and leave them again without harm to anybody."""

import functools
import threading
from collections.abc import Callable
from typing import Any


class Hook:
    """`serve(original, *args, **kwargs)` answers the calls of a method until `remove()`.

    What others put over a hook later is theirs and stays; the hook beneath it only passes calls on from then on.

    Args:
        owner: the class.
        name: its method.
        serve: called with the method that was there, and with what that was called with.

    Raises:
        KeyError: `owner` itself defines no such method.
    """

    def __init__(self, owner: type, name: str, serve: Callable[..., Any]) -> None:
        original = vars(owner)[name]
        self.owner, self.name, self.original, self.serves = owner, name, original, True

        @functools.wraps(original)
        def method(*args, **kwargs):
            return serve(original, *args, **kwargs) if self.serves else original(*args, **kwargs)

        self.method = method
        setattr(owner, name, method)

    def remove(self) -> bool:
        """Serve no longer; whether the class has its own method back, which it has not beneath somebody else's."""
        self.serves = False
        if vars(self.owner).get(self.name) is not self.method:
            return False
        setattr(self.owner, self.name, self.original)
        return True


_lock = threading.RLock()
_hooks: list[Hook] = []


def put(owner: type, name: str, serve: Callable[..., Any]) -> None:
    """Hook into `owner.name`, unless a hook serves there already."""
    with _lock:
        if not any(hook.serves and (hook.owner, hook.name) == (owner, name) for hook in _hooks):
            _hooks.append(Hook(owner, name, serve))


def remove_all() -> None:
    """Take every hook out. One that somebody else's patch covers is kept in mind, to go when it is on top again."""
    with _lock:
        _hooks[:] = [hook for hook in reversed(_hooks) if not hook.remove()][::-1]


def serving() -> list[Hook]:
    """The hooks that answer now."""
    return [hook for hook in _hooks if hook.serves]
