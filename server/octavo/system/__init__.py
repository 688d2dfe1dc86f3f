"""What the operating system gives and limits: memory, CPUs, signals, logging, files, the import of torch."""
