"""The CustomResourceDefinition, generated from the dataclasses of api/. `make crd` writes it."""
