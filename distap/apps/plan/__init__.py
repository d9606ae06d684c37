"""The cost model behind `distap plan`: what a training step costs, from one GPU to thousands."""
