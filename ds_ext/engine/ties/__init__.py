"""Parameters used by several layers: tied by a TiedLayerSpec, or shared as one object.

DeepSpeed sums the gradients of tied layers over the ranks that hold them. Two layers that share a parameter object have
one parameter if they are on the same rank, and otherwise one copy on each rank. The functions here compare objects over
the whole layer list, and tie shared parameters as DeepSpeed ties layers.
"""
