"""`distap plan`: predict the memory, the traffic and the seconds of a recipe's steps."""
