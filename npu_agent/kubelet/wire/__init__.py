"""Message classes and service stubs of the kubelet's APIs.

Generated from protos/ by `make protos`; never edited by hand. Only the modules that speak a
protocol import from here, so that another generator can take betterproto's place.
"""
