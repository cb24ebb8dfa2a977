"""A training file is checked as the job's objective will read it."""

import io
import json

from weft.serve.new_job import check_training_file
from weft.serve.settings import ServiceLimits


def check(weights, **reading):
    rows = [{"prompt": "ask", "completion": "yes", "weight": weight} for weight in weights]
    stream = io.BytesIO("".join(json.dumps(row) + "\n" for row in rows).encode())
    return check_training_file(stream, "rows.jsonl", ServiceLimits(), min_samples=1, **reading)


def test_training_file_when_rows_have_weights_then_wrong_ones_are_named_with_their_lines():
    report = check([1, 0.5, -2, None, "heavy", 0])
    assert report.num_samples == 6
    assert [(problem.line, problem.message.split("; ")[0]) for problem in report.problems] == [
        (3, "rows.jsonl line 3: weight is -2"),
        (5, "rows.jsonl line 5: weight is 'heavy'"),
    ]


def test_training_file_when_the_objective_reads_no_weights_then_they_may_be_anything():
    assert not check([-2, "heavy"], objective="supervised").problems
