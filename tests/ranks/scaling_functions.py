"""What the ranks of ``test_scaling`` run."""

from chapter19_9.slow_link import FREE, trained


def both(names, links, steps, **settings):
    """{strategy: its steps behind a free link, many of them, and then behind each of ``links``}."""
    return {
        name: [*trained(name, [FREE], steps=20, **settings), *trained(name, links, steps=steps, **settings)]
        for name in names
    }
