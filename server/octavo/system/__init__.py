"""Resources and limits of the operating system: memory, CPUs, signals, logging, files, the import of torch."""
