"""Words of tensors on a device: the same as on the host, and nobody waits for them."""

import torch

from paceline.agree import start_word, word_of


def test_a_word_is_the_same_as_on_the_host() -> None:
    tensors = [torch.randn(3, 5), torch.randn(3_000_001).bfloat16(), torch.tensor(True), torch.randn(70, 300).t()]
    for tensor in tensors:
        assert word_of([tensor.cuda()]) == word_of([tensor])
    assert word_of([tensor.cuda() for tensor in tensors]) == word_of(tensors)
    step = torch.tensor(3.0)  # as optimizers keep it, on the host
    assert word_of([*(tensor.cuda() for tensor in tensors), step]) != word_of([*(t.cuda() for t in tensors), step + 1])


def test_the_host_does_not_wait() -> None:
    large = torch.ones(1 << 24, device="cuda")
    tensors = [large, *large[:64].split(8)]
    expected = word_of(tensors)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)
        started = start_word(tensors)
        assert not started.done()
        large.zero_()  # behind it on the stream
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert started.word() == expected != word_of(tensors)
    assert started.done()
