"""The script `spec-trl`.

Python runs a package before anything inside it, and `import spec_trl` imports torch and transformers: seconds that
`--help` and a wrong option would have to wait for. So the script lies outside of the package and leaves its
`__init__.py` out; each command imports the parts that it works with, after its arguments were read.
"""

import importlib.util
import sys


def main() -> int:
    """Runs the command that the arguments of this process name; returns its exit status."""
    package = importlib.util.find_spec("spec_trl")
    assert package is not None
    sys.modules.setdefault("spec_trl", importlib.util.module_from_spec(package))
    from spec_trl.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
