import dataclasses
from pathlib import Path

import pytest
from synthetic_run import write_run

from weft.report.charts import MAX_BARS, MAX_MICROBATCHES, MAX_POINTS, draw_charts, drawn_microbatches
from weft.report.figure import job_colours
from weft.report.read_run import read_run
from weft.report.run_data import ReportSpan, RunData


@pytest.fixture(scope="module")
def run(run_dir: Path) -> RunData:
    return read_run(run_dir)


def test_draw_charts_when_the_run_is_complete_then_all_eight_are_there(run: RunData) -> None:
    drawn = set(draw_charts(run))
    over_time = {"throughput", "fill", "timeline"}
    assert drawn == {"loss", "eval_loss", "token_accuracy", "learning_rate", "grad_norm", *over_time}


def test_draw_charts_when_there_is_no_timeline_then_only_its_charts_are_missing(run: RunData) -> None:
    drawn = set(draw_charts(dataclasses.replace(run, spans=())))
    assert drawn == {"loss", "eval_loss", "token_accuracy", "learning_rate", "grad_norm", "throughput"}


def test_draw_charts_when_nothing_was_logged_then_there_are_none(run: RunData) -> None:
    jobs = tuple(dataclasses.replace(job, train=(), evals=()) for job in run.jobs)
    assert draw_charts(dataclasses.replace(run, jobs=jobs, spans=())) == {}
    assert draw_charts(dataclasses.replace(run, jobs=(), spans=())) == {}


def test_draw_charts_when_a_job_is_in_several_then_its_colour_is_the_same(run: RunData) -> None:
    charts = draw_charts(run)
    assert [trace.line.color for trace in charts["throughput"].data] == job_colours(5)
    assert [trace.marker.color for trace in charts["timeline"].data[:5]] == job_colours(5)
    assert [trace.meta["job"] for trace in charts["timeline"].data[:5]] == [0, 1, 2, 3, 4]


def test_loss_when_a_job_failed_then_a_cross_marks_its_last_finite_point(run: RunData) -> None:
    crosses = [trace for trace in draw_charts(run)["loss"].data if trace.mode == "markers"]
    assert [trace.meta["job"] for trace in crosses] == [3]
    assert crosses[0].x == (58,)


def test_token_accuracy_when_jobs_were_evaluated_then_dots_stand_beside_the_lines(run: RunData) -> None:
    traces = draw_charts(run)["token_accuracy"].data
    dots = [trace for trace in traces if trace.mode == "markers"]
    assert [trace.meta["job"] for trace in dots] == [i for i, job in enumerate(run.jobs) if job.evals]
    first = run.jobs[0]
    assert dots[0].x == tuple(p.step for p in first.evals)
    assert dots[0].y == pytest.approx([p.accuracy for p in first.evals], rel=1e-3)
    assert dots[0].marker.color == job_colours(5)[0]
    lines = [trace for trace in traces if trace.mode == "lines" and trace.hovertemplate]
    assert [trace.meta["job"] for trace in lines] == [0, 1, 2, 3, 4]


def test_token_accuracy_when_the_run_is_from_before_it_was_measured_then_only_its_chart_is_missing(
    run: RunData,
) -> None:
    jobs = tuple(
        dataclasses.replace(
            job,
            train=tuple(dataclasses.replace(p, accuracy=None) for p in job.train),
            evals=tuple(dataclasses.replace(p, accuracy=None) for p in job.evals),
        )
        for job in run.jobs
    )
    assert set(draw_charts(run)) - set(draw_charts(dataclasses.replace(run, jobs=jobs))) == {"token_accuracy"}


def test_own_metrics_when_some_jobs_have_them_then_their_lines_and_dots_are_drawn(run: RunData) -> None:
    plain, paired, *_ = run.jobs
    train = tuple(dataclasses.replace(p, further={"rewards/accuracies": 0.5}) for p in paired.train[:2])
    evals = tuple(dataclasses.replace(p, further={"rewards/accuracies": 0.75}) for p in paired.evals[:1])
    jobs = (plain, dataclasses.replace(paired, train=train, evals=evals))
    figure = draw_charts(dataclasses.replace(run, jobs=jobs))["own_0"]
    line, dots = figure.data
    assert (line.y, dots.y, dots.mode, line.meta["job"]) == ((0.5, 0.5), (0.75,), "markers", 1)
    assert figure.layout.yaxis.tickformat == ".2~%"


def test_curves_when_there_are_few_steps_then_ticks_are_whole_and_a_constant_rate_starts_at_zero(run: RunData) -> None:
    jobs = tuple(dataclasses.replace(job, train=job.train[:3]) for job in run.jobs)
    charts = draw_charts(dataclasses.replace(run, jobs=jobs))
    assert charts["loss"].layout.xaxis.dtick == 1
    assert charts["learning_rate"].layout.yaxis.rangemode == "tozero"
    assert draw_charts(run)["loss"].layout.xaxis.dtick is None


def test_throughput_then_its_area_is_the_trained_tokens(run: RunData) -> None:
    figure = draw_charts(run)["throughput"]
    for trace, job in zip(figure.data, run.jobs, strict=True):
        width = trace.x[1] - trace.x[0]
        assert sum(trace.y) * width == pytest.approx(job.trained_tokens, rel=0.01)


def test_throughput_when_a_job_starts_late_then_it_is_not_spread_over_the_time_before(run: RunData) -> None:
    train = tuple(dataclasses.replace(p, time=(p.time or 0.0) + 100.0) for p in run.jobs[0].train)
    late = dataclasses.replace(run.jobs[0], train=train)
    layer = draw_charts(dataclasses.replace(run, jobs=(late,)))["throughput"].data[0]
    assert all(y == 0 for x, y in zip(layer.x, layer.y, strict=True) if x < 98)


def test_timeline_when_a_microbatch_is_drawn_then_its_columns_add_up_to_its_fill(run: RunData) -> None:
    bars = [trace for trace in draw_charts(run)["timeline"].data if trace.yaxis != "y2"]
    span = run.microbatches[0]
    middle = span.start_s + span.duration_s / 2
    heights = [y for t in bars for x, y in zip(t.x, t.y, strict=True) if abs(x - middle) < 1e-3]
    assert sum(heights) == pytest.approx(100 * span.tokens / span.rows, rel=0.01)


def test_timeline_when_there_are_replicas_then_each_has_a_band_with_its_own_microbatches(run: RunData) -> None:
    spans = [
        dataclasses.replace(span, replica=i % 2) if span.name == "forward_backward" else span
        for i, span in enumerate(run.spans)
    ]
    figure = draw_charts(dataclasses.replace(run, spans=tuple(spans)))["timeline"]
    first, second = figure.layout.yaxis, figure.layout.yaxis3
    assert (*first.ticktext, *second.ticktext) == ("replica 0", "replica 1")
    assert first.domain[0] >= second.domain[1] > figure.layout.yaxis2.domain[1]
    of_second = {span.start_s + span.duration_s / 2 for span in spans if span.replica == 1}
    bars = [trace for trace in figure.data if trace.yaxis == "y3"]
    assert bars and all(any(abs(x - middle) < 1e-3 for middle in of_second) for trace in bars for x in trace.x)


def test_timeline_when_the_replica_is_in_stages_then_each_stage_has_a_band(run: RunData) -> None:
    passes = [span for span in run.spans if span.name == "forward_backward"]
    spans = [
        dataclasses.replace(span, name=name, replica=stage)
        for span in passes
        for name in ("forward", "backward")
        for stage in range(2)
    ]
    figure = draw_charts(dataclasses.replace(run, spans=tuple(spans)))["timeline"]
    assert (*figure.layout.yaxis.ticktext, *figure.layout.yaxis3.ticktext) == ("stage 0", "stage 1")
    for layouts, names in (
        (["spread:2"], ("replica 0", "replica 1")),
        (["stages:2", "spread:2"], ("stage 0", "stage 1")),
        (["none"], ("stage 0", "stage 1")),
    ):
        named = dataclasses.replace(run, spans=tuple(spans), info={**run.info, "layouts": layouts})
        figure = draw_charts(named)["timeline"]
        assert (*figure.layout.yaxis.ticktext, *figure.layout.yaxis3.ticktext) == names


def test_timeline_when_all_of_a_run_is_drawn_then_its_last_evaluation_is_too(run: RunData) -> None:
    trained, last = run.microbatches[0], run.microbatches[-1]
    after = ReportSpan("eval", last.start_s + last.duration_s + 1, 4.0, 0, 0, {})
    for passes, end_s in (((trained,), trained.start_s + trained.duration_s), ((trained, after), after.start_s + 4)):
        figure = draw_charts(dataclasses.replace(run, spans=passes))["timeline"]
        assert figure.layout.xaxis.range[1] == pytest.approx(end_s, rel=1e-5)
    assert [trace.name for trace in figure.data if trace.yaxis == "y2"] == ["eval"]
    beginning = draw_charts(dataclasses.replace(run, spans=(*run.spans, after)))["timeline"].layout.xaxis.range
    assert beginning[1] < last.start_s


def test_timeline_when_the_run_is_long_then_the_bars_are_capped(run: RunData) -> None:
    assert len(drawn_microbatches(run)) == MAX_MICROBATCHES
    shares = {f"job-{i}": 1.0 for i in range(100)}
    crowded = tuple(ReportSpan("forward_backward", float(i), 1.0, 100, 128, shares) for i in range(MAX_MICROBATCHES))
    assert len(drawn_microbatches(dataclasses.replace(run, spans=crowded))) == MAX_BARS // 100


def test_draw_charts_when_jobs_are_many_then_points_are_capped(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, num_copies=6, stretch=4))
    smoothed = [trace for trace in draw_charts(run)["loss"].data if trace.hovertemplate and trace.mode == "lines"]
    assert len(smoothed) == 30
    assert sum(len(trace.x) for trace in smoothed) <= MAX_POINTS
    assert len(set(job_colours(30))) == 30
