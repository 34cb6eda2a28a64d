"""The process and the machine below the engine: device, BLAS, heap, scratch directory, files read with bounds."""
