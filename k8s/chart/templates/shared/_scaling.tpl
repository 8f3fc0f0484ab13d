{{/* (dict "root" $ "service" "drafter" "target" map "threshold" number "query" text): KEDA's object, which scales by a sum
over all pods. Autoscaling's values are those of the service. Removing a pod is slow, since sessions have to move. */}}
{{- define "draftwire.scaledObject" -}}
{{- with (index .root.Values .service).autoscaling -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "draftwire.metadata" $ | nindent 2 }}
spec:
  scaleTargetRef: {{ toJson $.target }}
  minReplicaCount: {{ .minReplicas }}
  maxReplicaCount: {{ .maxReplicas }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        scaleDown:
          stabilizationWindowSeconds: 600
          {{- with $.scaleDown }}
          policies: {{ toJson . }}
          {{- end }}
  triggers:
    - type: prometheus
      metricType: AverageValue
      metadata:
        serverAddress: {{ .prometheusAddress }}
        threshold: {{ $.threshold | quote }}
        query: {{ .query | default $.query | quote }}
        {{- with .authModes }}
        authModes: {{ . | quote }}
        {{- end }}
      {{- if .authenticationRef.name }}
      authenticationRef: {{ toJson .authenticationRef }}
      {{- end }}
{{- end -}}
{{- end }}
