"""The memory of a step on a GPU that is not here."""

from jaxcompact.memory.buffers import KINDS as KINDS
from jaxcompact.memory.buffers import Buffer as Buffer
from jaxcompact.memory.cards import Device as Device
from jaxcompact.memory.cards import devices as devices
from jaxcompact.memory.cards import here as here
from jaxcompact.memory.measure import measure as measure
from jaxcompact.memory.peak import Peak as Peak
from jaxcompact.memory.peak import peak as peak
from jaxcompact.memory.search import LargestBatch as LargestBatch
from jaxcompact.memory.search import largest_batch as largest_batch
