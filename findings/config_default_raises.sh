#!/usr/bin/env bash
# transformers 5.24.0: getattr(config, "head_dim", default) and hasattr(config, "head_dim") of a Gemma 4 text config.
# Guessed: the value, or the default, as for every config. Layers of Gemma 4 have heads of two sizes, and reading the attribute
# raises AmbiguousGlobalPerLayerAttributeError, a RuntimeError. Only an AttributeError gives the default, so code that reads a
# config with care fails too. Other attributes, and to_dict(), are read as ever.
# Seen: getattr with a default and hasattr raise; to_dict()["head_dim"] is 256; a Gemma 3 config gives 256 by both.
. "$(dirname "$0")/environment.bash"
"$PYTHON" -m pip install -q torch==2.13.0 transformers==5.24.0
"$PYTHON" - <<'P'
from transformers import Gemma3TextConfig, Gemma4TextConfig

found = {}
for kind in Gemma3TextConfig, Gemma4TextConfig:
    config = kind()
    for how, read in ("getattr", lambda: getattr(config, "head_dim", None)), ("hasattr", lambda: hasattr(config, "head_dim")):
        try:
            found[kind.__name__, how] = read()
        except Exception as error:
            assert isinstance(error, RuntimeError) and not isinstance(error, AttributeError), "changed"
            found[kind.__name__, how] = type(error).__name__
    found[kind.__name__, "to_dict"] = config.to_dict()["head_dim"]
print(found)
error = "AmbiguousGlobalPerLayerAttributeError"
expected = {("Gemma3TextConfig", how): value for how, value in (("getattr", 256), ("hasattr", True), ("to_dict", 256))}
expected |= {("Gemma4TextConfig", how): value for how, value in (("getattr", error), ("hasattr", error), ("to_dict", 256))}
assert found == expected, "changed"
P
