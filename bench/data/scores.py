"""Synthesised two-voice canons as sequences of performance events.

A melody walks up and down a scale; a second voice repeats it some beats later, a third or an octave apart. So
a model that looks back by the right distance can predict half of the notes, which is what relative attention
is for.

Events are those of Huang et al., "Music Transformer" (2018), section 4.2, without velocities: note on, note
off, and time shifts.
"""

from __future__ import annotations

import numpy as np

PITCHES = 64
SHIFTS = 8
NOTE_ON, NOTE_OFF, SHIFT = 0, PITCHES, 2 * PITCHES
EVENTS = 2 * PITCHES + SHIFTS
"""Size of the vocabulary: event `SHIFT + n` lets n + 1 beats pass."""
MAJOR = (0, 2, 4, 5, 7, 9, 11)


def canon(events: int, random: np.random.Generator) -> np.ndarray:
    """Compose a canon and return its first events.

    Args:
        events: how many, at least 1.
        random: what decides about the notes.

    Returns:
        Integers from 0 to `EVENTS` - 1, of shape (events,).
    """
    key, delay, interval = int(random.integers(12)), int(random.integers(2, 5)), int(random.choice([2, 7]))
    degrees = [int(random.integers(7))]
    while len(degrees) < events:
        degrees.append(min(max(degrees[-1] + int(random.choice([-2, -1, 1, 2])), 0), 13))
    written: list[int] = []
    for beat in range(events):
        notes = [_pitch(key, degrees[beat])]
        if beat >= delay:
            notes.append(_pitch(key, degrees[beat - delay] + interval))
        written += [NOTE_ON + note for note in notes]
        written.append(SHIFT)
        written += [NOTE_OFF + note for note in notes]
    return np.array(written[:events])


def _pitch(key: int, degree: int) -> int:
    octave, step = divmod(degree, 7)
    return min(key + 12 * octave + MAJOR[step], PITCHES - 1)
