"""The inputs of a model, as a tree of tensors, and their parts: one for each chunk.

trees          cuts a tree along the batch, and calls a model with it: a mapping is keywords, or one argument
token_budget   TokenBudget: plans chunks by their number of tokens
multimodal     MultimodalSplit: texts with images, whose pixels do not have the batch's rows
image_counts   finds the images of each row in an input, and the patches of each image
parts          the input of one chunk, whose rows may stand in any order
"""
