"""A test over a table of cases, as one item of pytest.

An item costs pytest 5 to 10 ms of processor time. That is many times what a case costs which only calls a function.
"""

import functools
import inspect

import pytest

SHOWN = 20  # failed cases with their messages
FAILURES = (Exception, pytest.fail.Exception, pytest.skip.Exception)


def every_case(names, cases, ids=None):
    """Like ``pytest.mark.parametrize``, but all cases are one test, and its failure names those that failed.

    Fixtures of the test are the same for all cases. A case cannot be skipped: leave it out of ``cases``.

    Args:
        names: the parameters, separated by commas.
        cases: a value for each case, or a tuple with one for each parameter; or a function that returns them, which
            only the worker calls that runs the test.
        ids: makes the name of a case from its value. By default, it is the value or the tuple.
    """
    words = names.replace(",", " ").split()

    def decorate(test):
        @functools.wraps(test)
        def with_every_case(**fixtures):
            failed, number = {}, 0
            for number, case in enumerate(cases() if callable(cases) else cases, 1):
                values = (case,) if len(words) == 1 else case
                try:
                    test(**dict(zip(words, values, strict=True)), **fixtures)
                except FAILURES as error:
                    failed[f"{number}: {ids(case) if ids else _shortened(case)}"] = error
            assert number, "the table is empty"
            if failed:
                shown = [f"case {name}: {error}" for name, error in [*failed.items()][:SHOWN]]
                more = [f"and {len(failed) - SHOWN} more"] if len(failed) > SHOWN else []
                message = "\n".join([f"{len(failed)} of {number} cases failed", *shown, *more])
                raise AssertionError(message) from next(iter(failed.values()))

        signature = inspect.signature(test)
        fixtures = [each for name, each in signature.parameters.items() if name not in words]
        assert len(fixtures) + len(words) == len(signature.parameters), f"{test.__name__} has not all of {names}"
        with_every_case.__signature__ = signature.replace(parameters=fixtures)
        return with_every_case

    return decorate


def _shortened(case):
    text = case if isinstance(case, str) else repr(case)
    return text if len(text) <= 200 else f"{text[:200]}…"
