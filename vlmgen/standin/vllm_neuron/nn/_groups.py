"""Which ranks a layer is sharded over."""

import torch.distributed as dist

__all__ = ["resolve_group"]


def resolve_group(tp_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group a layer works in.

    Args:
        tp_group: a torch process group (a coordinator's ``device_group``), or None.

    Returns:
        The group itself; for None the world group, or None without torch.distributed.

    Raises:
        TypeError: a group coordinator was passed instead of its ``device_group``.
    """
    if tp_group is None:
        return dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(tp_group, dist.ProcessGroup):
        raise TypeError(
            f"tp_group must be a torch ProcessGroup, not {type(tp_group).__name__}; of a group "
            "coordinator pass device_group"
        )
    return tp_group
