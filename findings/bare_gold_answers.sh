#!/usr/bin/env bash
# TRL 1.16.0 accuracy_reward with math-verify 0.9.0 (latex2sympy2_extended 1.11.0).
# A gold answer that is bare LaTeX (no $...$, no \boxed), as the answer column of many data sets has it and TRL's docstring
# shows ("\frac{1}{3}", which is read rightly), is searched for a number: what is found first is the gold. So "10^{6}" is 10, "x \ge 0" is 0, "y=2x" is 2,
# "1,2,3" is 1.2, "2:30" is 2: the right answer gets 0.0 and a wrong one 1.0. Gold without a number
# ("(1,2)", "B", "x^2+1", "\infty") gives None: the example teaches nothing. The same gold within $...$ is right.
# Besides, whatever the gold: units and number bases are dropped (10 m is 10 cm, 101 is 101_2), and a completion with two
# boxes (a corrected answer) is a set of both, which is neither.
# Seen: the table below, as asserted.
. "$(dirname "$0")/environment.bash"
"$PYTHON" -m pip install -q torch==2.13.0 trl==1.16.0 transformers==5.24.0 math-verify==0.9.0 latex2sympy2_extended==1.11.0
"$PYTHON" - <<'P'
from trl.rewards import accuracy_reward


def reward(gold, answer):
    return accuracy_reward([[{"role": "assistant", "content": answer}]], [gold])[0]


# gold, right answer, its reward, wrong answer, its reward
for gold, right, got_right, wrong, got_wrong in [
    (r"10^{6}", r"\boxed{10^6}", 0.0, r"\boxed{10}", 1.0),
    (r"x \ge 0", r"\boxed{x \ge 0}", 0.0, r"\boxed{0}", 1.0),
    (r"y=2x", r"\boxed{y=2x}", 0.0, r"\boxed{2}", 1.0),
    (r"1,2,3", r"\boxed{1,2,3}", 0.0, r"\boxed{1.2}", 1.0),
    (r"2:30", r"\boxed{2:30}", 0.0, r"\boxed{2}", 1.0),
]:
    bare = reward(gold, right), reward(gold, wrong)
    marked = reward(f"${gold}$", right), reward(f"${gold}$", wrong)
    print(f"{gold:10} right {bare[0]} wrong {bare[1]} | in dollars: right {marked[0]} wrong {marked[1]}")
    assert bare == (got_right, got_wrong) and marked == (1.0, 0.0), "changed"
for gold in "(1,2)", "B", "x^2+1", r"\infty":
    print(gold, reward(gold, rf"\boxed{{{gold}}}"), "| in dollars", reward(f"${gold}$", rf"\boxed{{{gold}}}"))
    assert reward(gold, rf"\boxed{{{gold}}}") is None and reward(f"${gold}$", rf"\boxed{{{gold}}}") == 1.0, "changed"
assert reward(r"$10\text{ cm}$", r"\boxed{10\text{ m}}") == 1.0, "changed: units"
assert reward("$101_2$", r"\boxed{101}") == 1.0, "changed: bases"
assert reward("$5$", r"At first \boxed{4}, but it is \boxed{5}.") == 0.0, "changed: two boxes"
P
