"""The CustomResourceDefinitions, generated from the dataclasses of api/. `make crd` writes them."""
