"""What a segment costs on a backend, on this machine.

    protocol    how samples are taken and summed up: Measurement
    conditions  threads, allocator and load while measuring
    trial       a segment compiled by a backend and verified against ATen
    child       the same in a process of its own, which survives a crash or a hang
    log         the cost log: measurements in SQLite, keyed by all that could change them
    measurer    answers questions about costs from the log, or by measuring

Start at `measurer.Measurer`.
"""
