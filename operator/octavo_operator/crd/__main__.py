"""`python -m octavo_operator.crd FOLDER`: writes the CustomResourceDefinitions there."""

import sys
from pathlib import Path

from octavo_operator.crd import gateway, generate

if __name__ == "__main__":
    for made, text in ((generate.manifest(), generate.text()), (gateway.manifest(), gateway.text())):
        Path(sys.argv[1], f"octavo.dev_{made['spec']['names']['plural']}.yaml").write_text(text)
