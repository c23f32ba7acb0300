"""A network of slow lines on one machine: namespaces with a TUN device each, and one process between them.

`star` says what lines do to packets (pure), `train` how packets come in bundles, `forward` carries them, `namespaces`
makes the hosts, `stream` measures what comes through, `simulated` is for machines that do not permit any of it.
"""
