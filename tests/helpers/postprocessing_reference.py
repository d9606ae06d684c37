"""Slow, obvious versions of what is done to descriptors and rankings behind the network, as their
papers write it.
"""

from functools import partial

import numpy as np

from distap.retrieval.descriptor_files import (
    DESCRIPTORS_FILE,
    DescribedBy,
    DescriptorSet,
    write_described,
)


def write_descriptors(folder, descriptors):
    """Write a folder as `distap extract` does."""
    write_described(
        folder, descriptors, {DESCRIPTORS_FILE: partial(np.save, arr=descriptors.descriptors)}
    )


def unit(values):
    return values / np.linalg.norm(values, axis=1, keepdims=True)


def clustered(images, dimensions, classes, seed=0, noise=0.6, dtype=np.float32):
    """Descriptors around one centre a class, as a DescriptorSet."""
    generator = np.random.default_rng(seed)
    centres = unit(generator.normal(size=(classes, dimensions)))
    of_image = generator.integers(0, classes, images)
    values = centres[of_image] + noise * generator.normal(size=(images, dimensions)) / np.sqrt(
        dimensions
    )
    return described(unit(values).astype(dtype), of_image)


def described(values, of_image=None, network="net"):
    keys = np.array([f"image-{row}" for row in range(len(values))], dtype=np.str_)
    classes = np.array(
        [""] * len(values) if of_image is None else [f"class-{c}" for c in of_image], dtype=np.str_
    )
    return DescriptorSet(values, keys, classes, DescribedBy(network, "crop 64"), "a set")


def eigenvectors(covariance):
    """By falling eigenvalue; the greatest component of each positive."""
    values, columns = np.linalg.eigh(covariance)
    rows = [
        columns[:, column] * np.sign(columns[np.abs(columns[:, column]).argmax(), column])
        for column in range(len(values))
    ]
    return values[::-1], np.array(rows[::-1])


def pca_projection(values, power):
    """U^T / lambda^p."""
    values = values.astype(np.float64)
    variances, directions = eigenvectors(np.cov(values.T, bias=True))
    return np.array(
        [
            direction / variance**power
            for direction, variance in zip(directions, variances, strict=True)
        ]
    )


def whitened_reference(whitening, values):
    return unit((values.astype(np.float64) - whitening.mean) @ whitening.projection.T)


def lw_projection(values, classes):
    """eig(C_S^-1/2 C C_S^-1/2) C_S^-1/2 with the symmetric root, over each image and every other of
    its class.
    """
    values, classes = values.astype(np.float64), list(classes)
    pairs = [
        (i, j)
        for i, a in enumerate(classes)
        for j, b in enumerate(classes)
        if i != j and a == b != ""
    ]
    weights = [1 / (classes.count(classes[i]) - 1) for i, _ in pairs]
    outer = [np.outer(values[i] - values[j], values[i] - values[j]) for i, j in pairs]
    variances, directions = eigenvectors(np.average(outer, axis=0, weights=weights))
    root = sum(np.outer(d, d) / np.sqrt(v) for d, v in zip(directions, variances, strict=True))
    _, rotation = eigenvectors(root @ np.cov(values.T, bias=True) @ root)
    return rotation @ root


def expanded(queries, gallery, neighbours, power, exclude_self):
    result = []
    for number, query in enumerate(queries.astype(np.float64)):
        similarities = gallery.astype(np.float64) @ query
        order = [
            row
            for row in np.argsort(-similarities, kind="stable")
            if not (exclude_self and row == number)
        ]
        total = query.copy()
        for row in order[:neighbours]:
            total += max(similarities[row], 0.0) ** power * gallery[row]
        result.append(total)
    return unit(np.array(result))


def first_ranking(query, gallery, size, own_row):
    similarities = gallery.astype(np.float64) @ query.astype(np.float64)
    return [row for row in np.argsort(-similarities, kind="stable") if row != own_row][:size]


def k_reciprocal(query, gallery, size, own_row, neighbours, smoothing, original_weight):
    """Zhong et al. 2017, eq. 3 to 12, by sets, among the query (node 0) and the head."""
    head = first_ranking(query, gallery, size, own_row)
    nodes = np.vstack([query, gallery[head]]).astype(np.float64)
    distance = (1 - nodes @ nodes.T) / 2
    total = range(len(nodes))

    def nearest(p, k):
        return [p, *[n for n in np.argsort(distance[p], kind="stable") if n != p][:k]]

    def reciprocal(p, k):
        return {n for n in nearest(p, k) if p in nearest(n, k)}

    def grown(p):
        first = reciprocal(p, neighbours)
        result = set(first)
        for candidate in first:
            around = reciprocal(candidate, round(neighbours / 2))
            if len(around & first) > 2 / 3 * len(around):
                result |= around
        return result

    vectors = np.zeros((len(nodes), len(nodes)))
    for p in total:
        for g in grown(p):
            vectors[p, g] = np.exp(-distance[p, g])
        vectors[p] /= vectors[p].sum()
    smooth = np.array(
        [np.mean([vectors[n] for n in nearest(p, smoothing - 1)], axis=0) for p in total]
    )
    jaccard = [1 - np.minimum(smooth[0], v).sum() / np.maximum(smooth[0], v).sum() for v in smooth]
    final = [(1 - original_weight) * jaccard[p] + original_weight * distance[0, p] for p in total][
        1:
    ]
    return [head[place] for place in np.argsort(np.round(final, 12), kind="stable")], final
