"""Certifies on this device that every op on the path of a loaded model is exact (C1 and C2).

``path`` finds the ops of a model, ``rows`` and ``steps`` judge them, ``certificate`` keeps what
they found, ``worker`` runs all of it when a server starts.
"""
