"""Draft heads, one module per method. The `__all__` of each module lists its public names.

Creating or loading draft heads imports this package, which registers them with `AutoConfig` and `AutoModel` and
installs the hook in `generate`.
"""

from .. import dispatch
from . import (
    auto,
    dflash,
    dflash2,
    domino,
    draft_lm,
    dspark,
    eagle,
    eagle3,
    hydra,
    lookup,
    medusa,
    mtp,
    peagle,
    poss,
    poss_eagle3,
    poss_lora,
)
from .dflash import *  # noqa: F403 (here and below: what the module's `__all__` names)
from .dflash2 import *  # noqa: F403
from .domino import *  # noqa: F403
from .draft_lm import *  # noqa: F403
from .dspark import *  # noqa: F403
from .eagle import *  # noqa: F403
from .eagle3 import *  # noqa: F403
from .hydra import *  # noqa: F403
from .lookup import *  # noqa: F403
from .medusa import *  # noqa: F403
from .mtp import *  # noqa: F403
from .peagle import *  # noqa: F403
from .poss import *  # noqa: F403
from .poss_eagle3 import *  # noqa: F403
from .poss_lora import *  # noqa: F403

auto.register()
dispatch.install()

__all__: list[str] = []
__all__ += dflash.__all__
__all__ += dflash2.__all__
__all__ += domino.__all__
__all__ += draft_lm.__all__
__all__ += dspark.__all__
__all__ += eagle.__all__
__all__ += eagle3.__all__
__all__ += hydra.__all__
__all__ += lookup.__all__
__all__ += medusa.__all__
__all__ += mtp.__all__
__all__ += peagle.__all__
__all__ += poss.__all__
__all__ += poss_eagle3.__all__
__all__ += poss_lora.__all__
