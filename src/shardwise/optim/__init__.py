"""Optimizers for sharded parameters, clipping, token weighting and steps in backward.

Muon and SOAP update each matrix on one rank, its owner. From the top down::

    groups           finds the hidden matrices of a model
    muon, soap       the update of a matrix by its owner
    owner_optimizer  a step: matrices by their owners, other parameters by AdamW
    exchange         sends parts of matrices to owners, and updates back
    ownership        which rank owns which matrix, and what ranks send: pure integer code
    matrices         the matrices that a parameter consists of

`states` has the states of any optimizer as plain data, which another replica loads. Replicas that
train alone for many steps have an outer optimizer. From the top down::

    outer_optimizer  steps the parameters that replicas share, with the mean of their differences
    fragments        parameters that are synchronized together, and the format of differences
    outer            which fragments are synchronized after which step: pure integer code
"""

from shardwise.optim.adam8bit import Adam8bit
from shardwise.optim.groups import parameter_groups
from shardwise.optim.muon import Muon
from shardwise.optim.soap import SOAP

__all__ = ["SOAP", "Adam8bit", "Muon", "parameter_groups"]
