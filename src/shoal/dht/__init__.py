"""The distributed hash table: records with expirations, found from any node in a logarithmic number of calls.

Start reading at `node`. `routing`, `lookup` and `storage` are sans-IO.
"""

from shoal.dht.local import DhtSettings
from shoal.dht.node import DhtNode, Found, Item
from shoal.dht.schema import SchemaValidator
from shoal.dht.storage import StorageLimits, ValueWithExpiration
from shoal.dht.validation import CompositeValidator, RecordValidator, Subkey, check_validators

__all__ = [
    "CompositeValidator",
    "DhtNode",
    "DhtSettings",
    "Found",
    "Item",
    "RecordValidator",
    "SchemaValidator",
    "StorageLimits",
    "Subkey",
    "ValueWithExpiration",
    "check_validators",
]
