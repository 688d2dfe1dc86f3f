"""The parts that models are made of. Tensor parallelism and quantisation are their business, not the models'."""
