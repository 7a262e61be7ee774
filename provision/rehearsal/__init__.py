"""A rehearsal: faults that are injected into a short run of a job, and the certificate of what it survived. Pure.

``faults`` declares the faults, ``templates/rehearse/`` has their scripts, and ``tasks/rehearse.py`` runs them.
"""
