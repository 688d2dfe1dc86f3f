"""`python -m octavo_operator.crd > crds/octavo.dev_llmdeployments.yaml`: prints the CustomResourceDefinition."""

import sys

from octavo_operator.crd.generate import text

if __name__ == "__main__":
    sys.stdout.write(text())
