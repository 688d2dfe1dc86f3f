"""The parts that models are made of. They know tensor parallelism and quantisation, so that models need not."""
