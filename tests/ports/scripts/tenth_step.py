"""The ranks ask after every tenth step whether to stop, however long the steps take."""

from patched import after, script

check = script.next_check = 10


@after(script, "any_rank_stops")
def ask_ten_steps_later(device):
    global check
    check += 10
    script.next_check = check
