"""The barrier of a Gluon program's warps, under the name that it has in this Triton: another one in 3.6."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
