"""What programs import; the server that they are forked from has done so once."""
# ruff: noqa: F401

import gc

import datasets
import lightning
import scipy.stats
import sklearn.linear_model
import torch._dynamo
import transformers.models.bert.modeling_bert
import transformers.models.roberta.modeling_roberta
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import whitenedcse.app.cli
import whitenedcse.app.train
import whitenedcse.evaluation.classifiers
import whitenedcse.evaluation.suite
import whitenedcse.report.figures
import whitenedcse.training.checkpoints
import whitenedcse.training.dashboard
import whitenedcse.training.loggers
import whitenedcse.training.module
import whitenedcse.training.monitor
import whitenedcse.training.trainer

get_checkpoint_conversion_mapping("bert")
gc.set_threshold(50_000, 50, 50)  # as in conftest
gc.collect()
gc.freeze()  # else each collection of a program would copy these pages
