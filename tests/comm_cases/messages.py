"""Messages between two ranks: sizes, tags and ends that do not fit, and sends that no loss reaches."""

from __future__ import annotations

import torch

from wholebatch.comm.point_to_point import EPOCHS

from .registry import around, case, receives_first, refused, with_settings


@case
def messages_that_do_not_fit(comm):
    """Another dtype with the same number of bytes raises at both ends, and the error names both dtypes."""
    if comm.size == 1:
        handle = comm.isend(torch.zeros(2), 0)
        with refused("sends float32.2.*expects int32"):
            comm.recv(torch.zeros(2).int(), 0)
        with refused("sends float32.2.*expects int32"):
            handle.wait()
        tag = 5 if comm.transport.keeps_tags(torch.zeros(2)) else 0
        with refused(f"waits for a message from itself, tag {tag}, that it has not sent"):
            comm.recv(torch.zeros(2), 0, tag=tag)
    elif comm.rank < 2:
        with refused(r"rank 0 sends float32\(2\) in isend to rank 1, rank 1 expects int32\(2\) in irecv from rank 0"):
            if comm.rank == 0:
                comm.send(torch.zeros(2), 1)
            else:
                comm.recv(torch.zeros(2).int(), 0)
    assert comm.all_reduce(torch.tensor(1)).item() == comm.size


@case
def messages_of_another_size(comm):
    """Messages that are longer or shorter than expected, or empty, raise at both ends, which continue.

    No communicator of the same ranks takes the rest of such a message for a later one.
    """
    if comm.size == 1:
        return
    for round, (sent, expected) in enumerate([(4, 3), (3, 4), (1000, 1), (1, 1000), (0, 5), (5, 0), (4, 3)]):
        if comm.rank < 2:
            with refused(rf"sends float32\({sent}\) .*expects float32\({expected}\) "):
                if comm.rank == 0:
                    comm.send(torch.full((sent,), -1.0), 1, tag=9)
                else:
                    comm.recv(torch.zeros(expected), 0, tag=9)
            later = with_settings(comm) if round == 3 else comm
            for size in (sent, expected, 7):
                message = torch.arange(float(size)) + round
                if comm.rank == 0:
                    later.send(message, 1, tag=9)
                else:
                    assert torch.equal(later.recv(torch.zeros(size), 0, tag=9), message)
        elif round == 3:
            with_settings(comm)
    assert comm.all_reduce(torch.tensor(1)).item() == comm.size


@case
def messages_with_a_mistake_at_one_end(comm):
    """The other end raises at once; gradients of later messages arrive."""
    if comm.size == 1:
        return
    errors = []
    for wrong_end in (0, 1):
        if comm.rank < 2:
            wrong = comm.rank == wrong_end
            with refused(rf"rank {wrong_end}, i(send|recv) .* must be a tensor, got") as caught:
                if comm.rank == 0:
                    comm.send([1.0] if wrong else torch.zeros(3), 1)
                else:
                    comm.recv("nothing" if wrong else torch.zeros(3), 0)
            errors.append(str(caught.value))
        text = "\n".join(errors).encode()[:300].ljust(300)
        both = comm.all_gather(torch.frombuffer(bytearray(text), dtype=torch.uint8).unsqueeze(0))
        assert torch.equal(both[0], both[1])
        x = torch.full((3,), 2.0, requires_grad=True)
        loss = None
        if comm.rank == 0:
            comm.send(x, 1)
        elif comm.rank == 1:
            loss = comm.recv(torch.zeros(3), 0).square().sum()
        comm.backward(loss)
        assert x.grad is None if comm.rank else torch.equal(x.grad, torch.full((3,), 4.0))


@case
def a_tag_wears_out(comm):
    """A tag is refused after many messages that did not fit, so that no old message is taken for a new one."""
    if comm.size == 1:
        return
    for attempt in range(EPOCHS + 1):
        if comm.rank < 2:
            with refused("64 messages .* did not match" if attempt == EPOCHS else "a message must have the same"):
                if comm.rank == 0:
                    comm.send(torch.zeros(2), 1, tag=11)
                else:
                    comm.recv(torch.zeros(3), 0, tag=11)
    assert comm.all_reduce(torch.tensor(1)).item() == comm.size


@case
def sends_that_no_loss_reaches(comm):
    """A plain backward would omit the sender's gradient: it raises."""
    x = torch.ones(2, requires_grad=True)
    handle, y = around(comm, x, torch.empty(2))
    handle.wait()
    with refused(r"the backward pass of messages \(.*isend to rank \d.*comm.backward\(loss\)", RuntimeError):
        y.sum().backward()
    assert x.grad is None
    comm._order._waiting.clear()


@case
def messages_without_gradient(comm):
    """Messages of data take no part in the backward pass of either end; a gradient that cannot return is refused."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for like in (torch.empty(2), torch.empty(2).long()):
        handle, y = around(comm, torch.full_like(like, comm.rank), like)
        handle.wait()
        assert y.tolist() == [left, left]
        assert not y.requires_grad
    x = torch.ones(2, requires_grad=True)
    comm.all_reduce(x).sum().backward()
    assert not comm._order.waiting()
    late = receives_first(comm, x)
    handle = None if late else comm.isend(x, right)
    with (
        torch.no_grad(),
        refused(f"rank {left} sends a tensor that requires a gradient.* rank {comm.rank} receives it under"),
    ):
        comm.recv(torch.empty(2), left)
    with refused("receives it under torch.no_grad"):
        (comm.isend(x, right) if late else handle).wait()
