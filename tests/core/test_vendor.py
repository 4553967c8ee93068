"""What a vendor raises."""

from npu_agent.core.vendor import NotServedError


def test_what_is_not_served_says_why() -> None:
    error = NotServedError("an FPGA sample", sample=True)
    assert (str(error), error.sample) == ("an FPGA sample", True)
