"""From data as people have it to samples: sources, formats, chat templates, token ids, loss masks and order."""

from weft.data.chat_template import Tokenizer
from weft.data.dataset import Dataset, DataSummary, JobData
from weft.data.load import Prompt, load_dataset, load_job_data, load_prompts, prompt_of
from weft.data.order import BatchSchedule, epoch_order
from weft.data.samples import Sample

__all__ = [
    "BatchSchedule",
    "DataSummary",
    "Dataset",
    "JobData",
    "Prompt",
    "Sample",
    "Tokenizer",
    "epoch_order",
    "load_dataset",
    "load_job_data",
    "load_prompts",
    "prompt_of",
]
